"""`python -m expert_node` is `expert-node`."""

from expert_node.cli import main

if __name__ == "__main__":
    main()
