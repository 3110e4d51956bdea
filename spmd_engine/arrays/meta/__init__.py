"""Meta arrays, which have shapes and dtypes but no memory: code runs on them to be measured."""
