"""Functions as processes on this machine: `platform` starts and ends them."""
