"""`python -m nearfield`, and the console script `nearfield`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say in one line what it needs."""
    try:
        from nearfield.app import cli
    except ImportError as error:
        sys.exit(str(error))
    cli.main()


if __name__ == "__main__":
    main()
