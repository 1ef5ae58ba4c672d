#include <cstdio>

#include <weft/version.h>

int main() {
  std::printf("weft %s\n", weft::version());
  return 0;
}
