"""The recipe of the bundled pair: from the Python sources on this machine to two finished model folders."""
