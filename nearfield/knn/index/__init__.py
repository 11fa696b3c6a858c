"""Indices: who are the k keys of largest inner product?"""
