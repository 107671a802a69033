"""`python -m localtrain` is the same as `localtrain`."""

from localtrain.cli import main

if __name__ == "__main__":
    main()
