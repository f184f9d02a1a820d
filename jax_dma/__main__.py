"""``python -m jax_dma``: what works here (status), how fast it is (bench) and how accurate (check)."""

import argparse
import json
import sys
import warnings

from jax_dma.command import bench, check, status


def main(arguments=None):
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_dma",
        description="Without a command: status. `python -m jax_dma COMMAND --help` lists the options of a command.",
    )
    parser.add_argument("--json", action="store_true", help="print the status as one JSON object")
    commands = parser.add_subparsers(metavar="{status,check,bench}", dest="command")
    as_json = argparse.ArgumentParser(add_help=False)
    # SUPPRESS: an option that is absent after the command must not undo the one before it.
    as_json.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print the result as one JSON object"
    )
    for module in (status, check, bench):
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(
            name, parents=[as_json], help=module.HELP, description=module.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        module.add_arguments(command)
        command.set_defaults(module=module, error=command.error)
    options = parser.parse_args(arguments)
    module = getattr(options, "module", status)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = module.run(options)
    print(json.dumps(result, indent=2) if options.json else module.render(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
