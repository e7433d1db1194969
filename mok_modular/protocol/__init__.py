"""The words and rules that everything else uses: plans, sizes, calls, errors, traces. Imports no other folder."""
