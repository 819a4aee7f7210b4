"""The model directory in our format: manifest, reader, writer and conversion."""
