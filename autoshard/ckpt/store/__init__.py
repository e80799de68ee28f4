"""Steps on disk: manifest, Orbax, the directory, retention."""
