"""Programs for a node of a Slurm cluster, which may have no more than an old Python.

They import nothing but the standard library, and are read by Python 3.6.
"""
