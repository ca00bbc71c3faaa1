"""The daemon's process: it builds the store, answers requests, and takes back what a client that died held.

The command line starts it. Frames come in at the sockets and replies go out there; metrics and a web page go
out over HTTP.
"""
