"""`python -m bapo_openrlhf.cli COMMAND` is the same as `bapo-openrlhf COMMAND`."""

from bapo_openrlhf.cli.main import main

if __name__ == "__main__":
    main()
