"""The command line's own code: `jaxoff COMMAND`.

`jaxoff/__main__.py` declares the commands; `load_user_function` imports a user's `MODULE:FUNCTION`, calls the
function and checks the result: a train step or loss, and its arguments. `report_errors` tells errors of the
user's code by the lines of that code.

In: text of the command line. Out: Python objects, or a `ValueError` with the reason.

Invariant: commands hold no logic of their own. Each calls a public function of jaxoff and prints the result.
"""
