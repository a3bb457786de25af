"""Commands of other distributions (entry-point group ``attn.commands``): listed unseen, loaded when called, never harmful."""

from __future__ import annotations

import json

import pytest

from toy_plugins import Site, site

__all__ = ["site"]

HELLO = """
import click

@click.command()
@click.option("--name", default="world")
@click.pass_context
def hello(ctx, name):
    \"\"\"Say hello.\"\"\"
    click.echo(f"hello {name}")
    ctx.exit(4)

not_a_command = "text"
"""


def add(site: Site, name: str, entries: str, code: str = HELLO) -> None:
    site.add(name, None, code, version="1.5", entry_points=f"[attn.commands]\n{entries}\n")


def test_a_command_is_listed_without_importing_it(site: Site) -> None:
    add(site, "attn-hello", "hello = attn_hello:hello", "raise SystemExit('imported')")
    done = site.attn("--help")
    assert done.returncode == 0, done.stderr
    section = done.stdout.partition("Commands of other packages:")[2]
    assert section.split() == ["hello", "from", "attn-hello", "1.5"]


def test_a_command_is_loaded_when_it_is_called(site: Site) -> None:
    add(site, "attn-hello", "hello = attn_hello:hello")
    done = site.attn("hello", "--name", "you")
    assert (done.returncode, done.stdout) == (4, "hello you\n")
    assert "Say hello." in site.attn("hello", "--help").stdout


@pytest.mark.parametrize(
    ("entry", "code", "said"),
    [
        ("hello = attn_hello:hello", "raise SystemExit('no licence')", "SystemExit: no licence"),
        ("hello = attn_hello:hello", "import nothing_here", "No module named 'nothing_here'"),
        ("hello = attn_hello:helo", HELLO, "no attribute 'helo'"),
        ("hello = attn_hello:not_a_command", HELLO, "is str, not a click command"),
        ("hello = attn_hello", HELLO, "is module, not a click command"),
        ("hello = attn_hello.other:hello", HELLO, "No module named 'attn_hello.other'"),
    ],
)
def test_a_broken_command_is_an_error_that_says_whose_it_is(site: Site, entry: str, code: str, said: str) -> None:
    add(site, "attn-hello", entry, code)
    done = site.attn("hello", "--json")
    assert done.returncode == 1
    assert "[AC-PLG-001] command 'hello' cannot be loaded" in done.stderr
    assert said in done.stderr
    assert "attn-hello 1.5" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "AC-PLG-001"
    assert site.attn("list").returncode == 0


def test_a_command_never_replaces_one_of_core(site: Site) -> None:
    add(site, "attn-thief", "list = attn_thief:hello\nverify = attn_thief:hello", "raise SystemExit('stolen')")
    assert site.attn("list").returncode == 0
    assert "attn-thief" not in site.attn("--help").stdout
    assert "stolen" not in site.attn("verify", "--help").stderr


def test_two_distributions_with_one_command_are_told_apart(site: Site) -> None:
    add(site, "attn-one", "hello = attn_one:hello")
    add(site, "attn-two", "hello = attn_two:hello")
    assert "from attn-one 1.5 and attn-two 1.5" in site.attn("--help").stdout
    done = site.attn("hello")
    assert done.returncode == 1
    assert "claimed by 2 distributions" in done.stderr
    assert "pip uninstall attn-two" in done.stderr


def test_a_module_that_an_extra_would_bring_is_named(site: Site) -> None:
    add(
        site,
        "attn-hello",
        "hello = attn_hello:hello",
        HELLO.replace("click.echo(f", "import nothing_here; click.echo(f"),
    )
    done = site.attn("hello")
    assert done.returncode == 1
    assert "No module named 'nothing_here'" in done.stderr
    assert "install the package that holds 'nothing_here'" in done.stderr
    assert "Traceback" not in done.stderr


def test_with_core_alone_demo_says_what_to_install(site: Site) -> None:
    done = site.attn("demo")
    assert done.returncode == 2
    assert "pip install attn-transformers[demo]" in done.stderr
    assert "Commands of other packages" not in site.attn("--help").stdout


def test_a_misspelt_command_is_met_with_the_nearest_one(site: Site) -> None:
    add(site, "attn-hello", "hello = attn_hello:hello")
    done = site.attn("helo")
    assert done.returncode == 2
    assert "Did you mean 'hello'?" in done.stderr
