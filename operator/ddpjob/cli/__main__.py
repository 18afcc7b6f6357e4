"""`python -m ddpjob.cli`: the same as `ddpjob`."""

import sys


def main() -> int:
    """The exit code."""
    try:
        from ddpjob.cli.main import main as command

        return command()
    except KeyboardInterrupt:  # while it is imported
        return 130
    except ModuleNotFoundError as error:
        # `pip install ddpjob` brings the program without its packages; some are imported as late as they are used.
        if not error.name or error.name.startswith("ddpjob"):
            raise
        print(f"ddpjob needs the package {error.name}: pip install 'ddpjob[cli]'", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
