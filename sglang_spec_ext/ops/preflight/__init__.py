"""Read an SGLang command line as SGLang would and say what is wrong before anything loads."""
