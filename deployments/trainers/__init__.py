"""Drop-ins for trainers: what each calls for its teacher's log-probabilities, answered by this service.

One file a trainer, to be named in that trainer's configuration; README.md has a table of the lines. They lie in this
package, and not among the examples, because a trainer imports them by their dotted name wherever the package is
installed. None of them imports its trainer before the trainer imports it.
"""
