"""`python -m bytetx` is `bytetx`."""

from bytetx.cli.commands import main

main()
