"""What a training step costs besides the layers.

Read in this order: `loss` (measured as one more layer), `gathered` (joined outputs, and the loss
over all of them), `alike` (an optimizer like another one), `optimizer` (optimizers of stand-ins),
`step` (how long their steps take), `guessed` (values that they read where there are none), `state`
(what they keep, and need in a step), `by_layer` (the same for each layer).
"""
