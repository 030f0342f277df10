"""Data: files to token rows with label masks, packed or padded, in one global order that no world size
changes.
"""
