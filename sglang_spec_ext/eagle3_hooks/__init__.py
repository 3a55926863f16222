"""EAGLE-3 hooks for targets whose class lacks them, and a check that states are captured.

SGLang drafts with EAGLE3 or DFLASH only for a target class that can capture hidden states of some
layers. Many classes wrap a language model that can and do not pass that on; others collect states
and lack the method that says which. They get the missing methods here, when the model is loaded
and only then: the class of the loaded target, no other, and only the methods that it lacks.
"""
