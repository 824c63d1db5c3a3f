"""Had a run collapsed? Rollout files of any trainer in, reports and an alarm out.

`readers` (files to records) -> `sample` (a bounded draw for each step) -> `encode` (token ids) ->
`scorers` (a model, here or behind a server) -> `diagnosis` -> `table`. Only `scorers` needs torch.
"""
