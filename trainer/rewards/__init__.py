"""What is done to rewards before advantages are estimated from them."""
