"""The dashboard: a browser shows what left each window, why, at which price, and the way back.

It only reads. Everything that it shows is in the ledger, and worked out by the kernel.
"""
