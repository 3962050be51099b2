"""What of this machine works, and what to do about the rest: the body of `la-export doctor`.

`evidence` asks, in child processes, so that a library that crashes or hangs takes nobody with it;
`judgement` turns the answers into verdicts and fixes. Imports no package but our own.
"""
