"""What the commands of `ray-artifact-sync` do; `cli.py` declares their options. Each returns its exit code.

0: done, and all is right. 1: done, and something that was found is not right. 2: the command could not do its work.
"""
