"""Makes `python -m ddpjob.cli` run the `ddpjob` command."""

import sys

from ddpjob.missing_package import missing_package


def main() -> int:
    """Run the command line, and return the exit code."""
    try:
        from ddpjob.cli.main import main as command

        return command()
    # The user has pressed Ctrl-C during the import.
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        # Some packages are imported on first use, so a missing package may become apparent only
        # here.
        print(missing_package(error, "ddpjob", "cli"), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
