"""``attn warmup PLAN``: compile and tune what a plan needs, before serving."""

from __future__ import annotations

import json
import time

import click


@click.command("warmup", help=__doc__)
@click.argument("plan_file", metavar="PLAN")
@click.option("--device", default=None, help="torch device; default: what the platform is")
@click.option("--max-rows", type=int, default=32, show_default=True, help="most rows of one step")
@click.option("--max-tokens", type=int, default=8192, show_default=True, help="most tokens of one step")
@click.option("--max-kv-len", type=int, default=None, help="longest context; default: the plan's")
@click.option("--json", "as_json", is_flag=True, help="print what was warmed up as JSON")
def command(
    plan_file: str, device: str | None, max_rows: int, max_tokens: int, max_kv_len: int | None, as_json: bool
) -> None:
    """Make the plan's backends here, checked against what is installed, and let each one compile."""
    from attn_core.cli.plan import read_plan
    from attn_core.context import GraphLimits
    from attn_core.platform import detect_platform
    from attn_core.router import Router

    plan = read_plan(plan_file)
    platform = detect_platform(device)
    where = device or {"rocm": "cuda"}.get(platform.device, platform.device)
    longest = max_kv_len or int(plan.limits.get("max_context") or 4096)
    page = max(plan.page_size, 1)
    widest = max((p.graph.max_query_len for _, _, p in plan.phase_plans()), default=1)
    rows = tuple(sorted({2**n for n in range(max_rows.bit_length())} | {max_rows}))
    limits = GraphLimits(rows, max_tokens, widest, longest, max_rows * -(-longest // page) + 1)
    router = Router(plan, device=where, limits=limits)
    started = time.perf_counter()
    router.warmup(limits)
    seconds = time.perf_counter() - started
    served = sorted({f"{p.backend}:{p.variant}" for _, _, p in plan.phase_plans()})
    if as_json:
        content = {
            "schema_version": 1,
            "plan": plan.fingerprint,
            "device": where,
            "backends": served,
            "seconds": seconds,
        }
        click.echo(json.dumps(content, indent=1))
    else:
        click.echo(f"{', '.join(served)}: ready on {where} after {seconds:.1f} s")
