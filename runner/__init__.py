"""On the node: map an artifact and decode. Never opens a checkpoint, never imports a compiler."""
