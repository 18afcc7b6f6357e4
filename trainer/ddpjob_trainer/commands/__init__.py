"""The commands of `python -m ddpjob_trainer`, one module each; `dispatch` finds them."""
