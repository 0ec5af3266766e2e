"""Let ``python -m gpipebal`` do what the command ``gpipebal`` does."""

import sys

from gpipebal.cli import main

if __name__ == "__main__":
    sys.exit(main())
