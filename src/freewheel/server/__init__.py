# SPDX-License-Identifier: Apache-2.0
"""`freewheel serve`: HTTP in front, the engine in a process of its own.

May import `freewheel.config`, `.spec`, `.chat` and `.engine`, and the libraries of the `server`
extra. Must never reach below the engine. Nothing is imported here: the command line looks whether
the extra is installed before it loads `freewheel.server.run`.
"""
