"""The messages between client and server, their form as bytes, and the directory that holds the sockets.

Client, server and command line use this package. A message goes in, frames of JSON come out, and the other
way round. KV itself is in no message: it lies in memory that client and server share.
"""
