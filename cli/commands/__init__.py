"""One file per command: parse, call one function, print.

A file defines a function of its own name, `(call, ...)`, decorated with `cli.command.command`, whose docstring
begins with the line in the table of `cli.main`, and `EXAMPLES`, which the help page shows and the tests run in
order; a line that ends with "# needs ..." is only shown. Slow imports (torch, huggingface_hub) belong inside
functions. A command prints only through `call.out` and raises `UserError`.
"""
