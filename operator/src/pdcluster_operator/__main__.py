"""`python -m pdcluster_operator` is `pdctl`."""

from pdcluster_operator.cli.main import main

if __name__ == "__main__":
    main()
