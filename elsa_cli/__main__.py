"""`python -m elsa_cli` is `elsa`."""

from elsa_cli.main import main

if __name__ == "__main__":
    main()
