"""What a result of `la-export bench` looks like: charts, tables, the paper's figures, changes.

`charts` and `tables` are pure functions of a record, `drawing` knows matplotlib, `page` writes.
"""
