"""`titan-fp8zero bench`: speed and memory, as ratios beside what the machine itself can do."""
