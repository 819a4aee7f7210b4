"""`python -m expert_driver` is `expert-net`."""

from expert_driver.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
