"""The command line's root: which commands there are. Must not know what any of them does."""

from __future__ import annotations

import typer

from serve_app.cli.bench import app as bench_app
from serve_app.cli.doctor import doctor
from serve_app.cli.fleet import deploy, drain, ready, undrain
from serve_app.cli.keys import app as keys_app
from serve_app.cli.models import app as models_app
from serve_app.cli.node import app as node_app
from serve_app.cli.plan import app as plan_app
from serve_app.cli.serve import serve
from serve_app.cli.status import status

app = typer.Typer(
    name="metalslots",
    help="Serve a language model to an office from its own Macs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("serve")(serve)
app.command("status")(status)
app.command("doctor")(doctor)
app.command("deploy")(deploy)
app.command("drain")(drain)
app.command("undrain")(undrain)
app.command("ready")(ready)
app.add_typer(keys_app, name="keys")
app.add_typer(models_app, name="models")
app.add_typer(node_app, name="node")
app.add_typer(bench_app, name="bench")
app.add_typer(plan_app, name="plan")
