"""One file for each architecture whose plan or behaviour its config does not declare. None is needed yet."""
