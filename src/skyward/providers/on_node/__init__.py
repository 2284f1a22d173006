"""Programs for a node, which may have no more than an old Python.

They import nothing but the standard library, and are read by Python 3.6.
"""
