"""`python -m bytetx` is `bytetx`."""

from bytetx.cli import main

main()
