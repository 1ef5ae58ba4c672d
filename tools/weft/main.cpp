#include "verbs.h"

int main(int argc, char** argv) { return weft::tool::command(argc, argv); }
