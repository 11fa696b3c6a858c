def plot(s, f):
    pass
