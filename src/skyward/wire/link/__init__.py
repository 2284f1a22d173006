"""Links: connections that are made again after they break, without losing a byte."""
