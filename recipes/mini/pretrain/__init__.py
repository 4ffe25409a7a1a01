"""The recipe of the bundled model, one module a stage; see the README beside this folder."""
