"""Faults in recurrent states."""
