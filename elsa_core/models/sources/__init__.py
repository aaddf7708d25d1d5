"""Where a model comes from: libraries, the hub, files; and how an unknown file is recognised."""
