"""How a collective call is made: checks of arguments, workspaces, operands, the two backward passes."""
