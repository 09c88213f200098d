"""`python -m megabench`."""

from __future__ import annotations

from megabench.cli import main

if __name__ == "__main__":
    main()
