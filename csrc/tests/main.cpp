#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "tests/support/transport_under_test.h"

int main(int argc, char** argv) {
  bls::testing::choose_transport();
  return doctest::Context(argc, argv).run();
}
