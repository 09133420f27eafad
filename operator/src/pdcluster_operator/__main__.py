"""`python -m pdcluster_operator` is `pdcluster-operator`."""

from pdcluster_operator.main import main

if __name__ == "__main__":
    main()
