"""`python -m pdctl` is `pdctl`."""

from pdctl.cli.main import main

if __name__ == "__main__":
    main()
